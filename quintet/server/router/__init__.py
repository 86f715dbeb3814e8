"""`quintet router`: one door before several servers that speak OpenAI's API. It runs no model and loads none."""
