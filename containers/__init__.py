"""Container images and service set-up."""
