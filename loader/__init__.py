"""Files in, files out: open, detect, decode, plan, write. No model library, no GPU."""
