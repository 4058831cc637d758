// Dialogs that wait for an answer.

/** The value of the button that closed it; "" if dismissed. */
export function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue);
  });
}
