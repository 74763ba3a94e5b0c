"""Tasks about objects in an image: grounding (one box), detection (boxes with confidences), counting."""
