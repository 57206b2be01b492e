"""Work on many parts at once: a pool of processes, a Dask cluster, progress bars."""
