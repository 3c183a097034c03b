// What became of every batch: a bar, numbers and a sentence.

import { $, color, el, empty, whole } from "./dom.js";

const sum = (counts) => Object.values(counts ?? {}).reduce((a, b) => a + b, 0);
const reasons = (counts) =>
  Object.entries(counts ?? {})
    .map(([reason, number]) => `${whole(number)}: ${reason}`)
    .join("\n") || null;

export function drawAccounting(now) {
  const host = $("accounting");
  const counts = now.accounting;
  if (!Object.keys(counts).length) {
    return host.replaceChildren(
      empty(now.state === "running" ? "Nothing has been counted yet." : "This run has none."),
    );
  }
  const [unit, rows, parts, verdict] = counts.samples ? ofSamples(counts) : ofBatches(now, counts);
  const all = Math.max(1, sum(Object.fromEntries(parts.map(([name, number]) => [name, number]))));
  const shares = parts.map(([, number, name]) =>
    el("i", { style: { width: `${(100 * number) / all}%`, background: color(name) } }),
  );
  host.replaceChildren(
    el(
      "div",
      {
        class: "shares",
        role: "img",
        "aria-label": parts.map(([name, number]) => `${whole(number)} ${unit} ${name}`).join(", "),
      },
      ...shares,
    ),
    el(
      "div",
      { class: "counts" },
      ...rows.map(([name, number, tip, isBad]) =>
        el(
          "div",
          { "data-tip": tip },
          el("span", {}, name),
          el("b", { class: isBad && number ? "bad" : "" }, whole(number)),
        ),
      ),
    ),
    el("p", { class: "dim" }, verdict),
  );
}

function ofBatches(now, counts) {
  const skipped = sum(counts.skipped);
  const open = now.state === "running" ? "not processed yet" : "not processed";
  const rows = [
    ["applied", counts.applied],
    ["skipped", skipped, reasons(counts.skipped)],
    ["lost", counts.lost, null, now.state !== "running"],
    ["applied twice", counts.applied_twice, null, true],
    [open, counts.not_processed],
    ["reassigned leases", counts.reassigned],
    ["refused pushes", sum(counts.refused), reasons(counts.refused)],
    ["block updates", counts.updates],
  ];
  if (counts.untracked_pushes) rows.push(["steps without batch IDs", counts.untracked_pushes]);
  const parts = [
    ["applied", counts.applied, "--good"],
    ["skipped", skipped, "--wait"],
    ["lost or applied twice", counts.lost + counts.applied_twice, "--bad"],
    [open, counts.not_processed, "--track"],
  ];
  return ["batches", rows, parts, verdictOf(now, counts, skipped)];
}

function verdictOf(now, counts, skipped) {
  if (now.state === "running") return "So far; batches in flight are not processed yet.";
  if (counts.lost || counts.applied_twice)
    return "✕ The batch accounting does not balance. Please report it, with the run's directory.";
  if (counts.applied + skipped === counts.batches) return "✓ Every batch was applied or skipped, exactly once.";
  return "✓ No batch was lost, and none was applied twice.";
}

function ofSamples({ samples }) {
  const skipped = sum(samples.skipped);
  const left = Math.max(0, samples.total - samples.applied - skipped - samples.not_seen);
  const rows = [
    ["applied", samples.applied],
    ["skipped", skipped, reasons(samples.skipped)],
    ["not seen", samples.not_seen],
    ["not processed", left],
    ["moved to a later batch", samples.carried_over],
    ["batches", samples.rounds],
    ["state transfers", samples.transfers],
    ["differing replicas", samples.drifted, null, true],
  ];
  const parts = [
    ["applied", samples.applied, "--good"],
    ["skipped", skipped, "--wait"],
    ["not seen", samples.not_seen, "--bad"],
    ["not processed", left, "--track"],
  ];
  return ["samples", rows, parts, "Samples are counted, because the workers share each batch."];
}
