"""Files and paths: atomic writes, compression, manifests."""
