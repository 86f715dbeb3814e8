"""Images, video and audio in conversations."""
