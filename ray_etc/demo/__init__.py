"""The demo: a real Ray cluster on this machine whose nodes come and go while a small GPT trains."""
