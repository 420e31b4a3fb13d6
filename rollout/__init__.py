"""Making episodes: the asynchronous manager, engines, weight roll-out, teachers, pairs and evaluation."""
