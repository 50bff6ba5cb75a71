"""Rewards for generated images and videos: scored, combined, served, and never silently zero."""
