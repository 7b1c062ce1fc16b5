"""What writes the generated parts of the pages, docs/index.html and the site.  From the root: python -m tools.build"""
