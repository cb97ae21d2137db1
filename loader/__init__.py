"""Files in, files out: open, detect, decode, plan, write. Needs neither a model library nor a
GPU."""
