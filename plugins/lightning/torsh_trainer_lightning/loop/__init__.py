"""Our loop for a LightningModule: Lightning's meaning, at a fraction of its price a step."""
