"""``doctor script``: launch scripts, images and manifests read for mistakes; none is executed."""
