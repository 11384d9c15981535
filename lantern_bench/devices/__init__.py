"""The machine: devices, dtypes, memory and threads. No models, no decoding."""
