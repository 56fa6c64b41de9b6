"""Many chats at once against a real engine whose tiers hold a tenth of them; every token of theirs is checked."""
