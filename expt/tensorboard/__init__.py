"""What people look at: the event file, and the pictures and numbers in it."""
