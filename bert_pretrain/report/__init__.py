"""Reports about runs and data: curves, hints, HTML pages and Markdown cards."""
