"""Parts of torch that are replaced for speed; each falls back to torch's own."""
