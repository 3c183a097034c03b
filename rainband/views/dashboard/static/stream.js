// The run's data: server-sent events, read by fetch, because EventSource cannot send the token in a header.

const RETRY_MS = 500;
const MAX_RETRY_MS = 8000;

function tokenOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const token = given.get("token") || sessionStorage.getItem("rainband-token") || "";
  sessionStorage.setItem("rainband-token", token);
  const rest = given.get("run") ? `#run=${encodeURIComponent(given.get("run"))}` : "";
  history.replaceState(null, "", location.pathname + rest); // the token does not stay in the address bar
  return [token, given.get("run") || ""];
}

export class Connection {
  constructor() {
    [this.token, this.run] = tokenOfAddress();
    this.aborter = null;
  }

  ask(path, parameters = {}, options = {}) {
    const query = new URLSearchParams({ ...(this.run ? { run: this.run } : {}), ...parameters });
    return fetch(`${path}?${query}`, { headers: { authorization: `Bearer ${this.token}` }, ...options });
  }

  // Call receive(kind, data) for every message; say(text) when the connection changes. Ends when the run has ended.
  async follow(receive, say) {
    this.aborter?.abort();
    const aborter = (this.aborter = new AbortController());
    for (let wait = RETRY_MS; ; wait = Math.min(MAX_RETRY_MS, 2 * wait)) {
      try {
        const answer = await this.ask("/api/stream", {}, { signal: aborter.signal });
        if (!answer.ok) {
          say(await answer.text());
          if (answer.status < 500) return;
        } else {
          wait = RETRY_MS;
          say("● live");
          if (await this.#read(answer.body, receive)) {
            say("");
            return;
          }
        }
      } catch (error) {
        if (aborter.signal.aborted) return;
        if (!(error instanceof TypeError)) throw error; // a TypeError of fetch: the server does not answer
      }
      say("○ not connected, trying again");
      await new Promise((resolve) => setTimeout(resolve, wait));
      if (aborter.signal.aborted) return;
    }
  }

  // Return true if the stream has ended because nothing more can come.
  async #read(body, receive) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return false;
      const messages = (rest + value).split("\n\n"); // no regular expression: U+2028 is a line end for these
      rest = messages.pop();
      for (const message of messages) {
        const fields = message.split("\n");
        const field = (name) => fields.find((line) => line.startsWith(name))?.slice(name.length);
        const kind = field("event: ");
        if (kind === "end") return true;
        if (kind) receive(kind, JSON.parse(field("data: ")));
      }
    }
  }
}

// Put what is new behind what the page has.
export function merged(history, update) {
  if (!history || history.version.join() !== update.version.join()) return update;
  const joined = (old, from, added) => [...old.slice(0, from), ...added];
  const curve = Object.fromEntries(
    Object.entries(update.curve).map(([name, added]) => [name, joined(history.curve[name], update.from_point, added)]),
  );
  const before = new Map(history.strips.map((strip) => [strip.rank, strip]));
  const strips = update.strips.map((strip) => {
    const old = before.get(strip.rank);
    const whole = (name) => joined(old[name], update.from_column, strip[name]);
    return { rank: strip.rank, missed_mean: whole("missed_mean"), waiting: whole("waiting"), per_s: whole("per_s") };
  });
  const column_s = joined(history.column_s, update.from_column, update.column_s);
  return { ...update, curve, strips, column_s, log: [...history.log, ...update.log].slice(-1000) };
}
