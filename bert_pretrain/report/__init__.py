"""Pages, pictures and cards: curves of runs, templates, Markdown."""
