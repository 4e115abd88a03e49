"""The commands of ``recovery``, one module a subject; each parses, calls and prints."""
