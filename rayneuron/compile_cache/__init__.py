"""Compiled graphs kept between starts: in a folder or an S3 bucket, one builder a key."""
