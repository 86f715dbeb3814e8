"""Routes of models that transcribe audio: /v1/audio/transcriptions and /v1/audio/translations."""
