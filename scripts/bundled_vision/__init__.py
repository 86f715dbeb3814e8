"""The training of quintet/bundled-vision by train.py: pictures, talks about them, and the model card."""
