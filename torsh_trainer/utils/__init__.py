"""What every room may use: files, names, words, and nothing of training."""
