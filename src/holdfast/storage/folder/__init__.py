"""Objects as files of a folder, never through a link."""
