"""tensorrt_llm/logger.py (all versions): `logger.info`, `logger.warning`, `logger.info_once`."""


class Logger:
    def __init__(self):
        self.lines = []

    def info(self, text):
        self.lines.append(("info", text))

    def warning(self, text):
        self.lines.append(("warning", text))

    def info_once(self, text, key):
        if ("info", text) not in self.lines:
            self.info(text)


logger = Logger()
