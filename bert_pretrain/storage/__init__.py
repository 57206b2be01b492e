"""Files and paths, local or remote: atomic writes, compression, manifests."""
