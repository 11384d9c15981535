"""What decode steps cost on this machine: measurements, roofline, memory, and the search for the fastest tree."""
