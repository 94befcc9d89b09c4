"""Models and data of examples/imagenet.py."""
