"""Quality metrics: fidelity through torch-fidelity, CLIP scores through open_clip, so that figures match theirs."""
