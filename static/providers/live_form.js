// The provider form: what is wrong is said while it is filled in, and a connection is tested
// without leaving the page. It knows no provider: fields, checks and texts come from the server.
(() => {
  const trial = document.getElementById("trial");
  if (!trial) {
    return;
  }
  const form = document.getElementById("providerconfig_form");
  const button = document.getElementById("test-connection");
  const result = document.getElementById("test-result");
  const touched = new Set();
  let latest = 0;

  const send = async (url, body) => {
    const response = await fetch(url, { method: "POST", body, credentials: "same-origin" });
    if (!response.ok) {
      throw new Error(`The server answered ${response.status}.`);
    }
    return response.json();
  };

  const values = () => {
    if (trial.dataset.stored === "1") {
      const body = new FormData();
      body.append("_stored", "1");
      body.append("csrfmiddlewaretoken", trial.querySelector("[name=csrfmiddlewaretoken]").value);
      return body;
    }
    return new FormData(form);
  };

  const note = (control, text) => {
    const id = `${control.id}_live`;
    let shown = document.getElementById(id);
    if (!shown) {
      shown = document.createElement("p");
      shown.id = id;
      shown.className = "live-error";
      control.insertAdjacentElement("afterend", shown);
      control.setAttribute("aria-describedby", id);
    }
    shown.textContent = text;
    control.setAttribute("aria-invalid", text ? "true" : "false");
  };

  // A stored secret that was not touched is asked for again when something else was changed.
  const concerned = (control) =>
    touched.has(control.name) || (control.type === "password" && !control.required);

  const showErrors = (errors, everywhere) => {
    for (const control of form.elements) {
      if (control.name && control.id && control.type !== "hidden" &&
          (everywhere || concerned(control))) {
        note(control, [].concat(errors[control.name] || []).join(" "));
      }
    }
  };

  const validate = async () => {
    const number = ++latest;
    try {
      const { errors } = await send(trial.dataset.validate, values());
      if (number === latest) {
        showErrors(errors, false);
      }
    } catch {
      // The check on saving still holds; a lost one while typing is no news.
    }
  };

  if (form && trial.dataset.validate) {
    form.addEventListener("change", (event) => {
      if (event.target.name) {
        touched.add(event.target.name);
        validate();
      }
    });
  }

  const line = (className, text) => {
    const element = document.createElement("span");
    element.className = className;
    element.textContent = text;
    result.append(element);
  };

  button.addEventListener("click", async () => {
    button.disabled = true;
    result.replaceChildren();
    line("badge badge-quiet", "Testing…");
    try {
      const tried = await send(trial.dataset.test, values());
      result.replaceChildren();
      line(`badge badge-${tried.success ? "good" : "bad"}`, tried.success ? "Works" : tried.code || "Failed");
      if (tried.latency_ms !== null) {
        line("trial-figure", `${tried.latency_ms} ms`);
      }
      if (tried.runtime) {
        line("trial-figure", tried.runtime);
      }
      if (tried.isolation && tried.isolation !== tried.runtime) {
        line("trial-figure", tried.isolation);
      }
      line("trial-message", tried.message);
      if (trial.dataset.validate) {
        showErrors(tried.errors, true);
      }
    } catch (error) {
      result.replaceChildren();
      line("badge badge-bad", "Failed");
      line("trial-message", error.message);
    } finally {
      button.disabled = false;
    }
  });
})();
