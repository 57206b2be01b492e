"""Files, manifests, and work on several processes; knows no stage."""
