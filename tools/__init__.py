"""Programs that write the generated parts of the pages, docs/index.html and the site: python -m tools.build"""
