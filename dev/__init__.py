"""Programs that write the generated parts of the pages, docs/side_by_side.html and the site: python -m dev.build"""
