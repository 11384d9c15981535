"""Training: one loop for everything that is trained here. What is trained is a task, kept where its model lives."""
