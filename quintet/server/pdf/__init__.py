"""Text of PDF files for the page, extracted by pypdf in child processes with limits."""
