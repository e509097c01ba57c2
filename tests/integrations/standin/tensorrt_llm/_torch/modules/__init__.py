"""See tensorrt_llm/__init__.py."""
