"""Callbacks for trainers and experiment trackers that people use; each file imports its own package, when used."""
