"""Modules that other serving engines load; each folder here is a package that such an engine imports by its path."""
