"""Tools of the user's own, which a conversation in the terminal may call: functions and programs, once allowed."""
