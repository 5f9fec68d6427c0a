// The form of the goals. Fields that nobody edits follow the control plane, so that a change of one field does not take
// back what another operator has set in the other.

import { number } from "./model.js";

export class Goals {
  // `elements`: section, form, replicas, spare, inForce, button. `submit(goals, text)` asks, and sends; it returns true
  // if the goals have changed.
  constructor(elements, submit) {
    this.elements = elements;
    this.goals = null;
    const { form, replicas, spare } = elements;
    this.fields = [
      { input: replicas, name: "replicas", isEdited: false },
      { input: spare, name: "spare", isEdited: false },
    ];
    for (const field of this.fields) {
      field.input.addEventListener("input", () => {
        field.isEdited = Number(field.input.value) !== this.goals?.[field.name] || field.input.value === "";
      });
    }
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const goals = { replicas: Number(replicas.value), spare: Number(spare.value) };
      const text = `From ${this.sentence(this.goals)} to ${this.sentence(goals)}.`;
      if (await submit(goals, text)) for (const field of this.fields) field.isEdited = false;
    });
  }

  show(goals) {
    this.goals = goals;
    this.elements.section.hidden = false;
    this.elements.inForce.textContent = `In force: ${this.sentence(goals)}.`;
    for (const field of this.fields) if (!field.isEdited) field.input.value = goals[field.name];
  }

  allow(mayChange) {
    this.elements.button.disabled = !mayChange;
  }

  sentence(goals) {
    return goals ? `${number(goals.replicas)} replicas of each expert at least, and ${number(goals.spare * 100, 2)} % beyond that` : "unknown goals";
  }
}
