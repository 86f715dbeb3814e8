"""The parts of scripts/train_bundled_vision.py: pictures, talks about them, the training and the model card."""
