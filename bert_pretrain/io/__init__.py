"""Files, manifests and process pools. Nothing here depends on a stage."""
