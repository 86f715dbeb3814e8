"""Settings of images, video and audio in prompts."""
