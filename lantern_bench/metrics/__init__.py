"""Quality metrics. Fidelity uses torch-fidelity and CLIP scores use open_clip, as papers do."""
