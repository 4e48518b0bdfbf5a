"""Ray Serve, and only here: the application, its replica and its HTTP routes."""
