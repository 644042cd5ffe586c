"""Rolling checkpoints: how they are written, which stay, and from which training resumes."""
