"""What trains: clients, models, data and the halves of split learning. The torch rooms."""
