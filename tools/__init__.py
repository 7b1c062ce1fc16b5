"""What writes docs/ and the generated parts of README.md.  Started from the repository's root: python -m tools.build"""
