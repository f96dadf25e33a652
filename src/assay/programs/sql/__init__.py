"""Text to SQL: databases that an agent can only read, their schemas as text, and the agent."""
