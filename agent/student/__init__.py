"""The tiny student: 0.9 million parameters, made on a laptop, and packaged so that the loop runs anywhere."""
