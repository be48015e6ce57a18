"""Applications that show recado at work; each is run by the tests, too."""
