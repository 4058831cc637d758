// A mask on a canvas of the picture's size, with undo.

const COLOUR = "#f0288c";
const SAMPLES = 256;

const DRAW = {
  hole(context, { image }, { width, height }) {
    context.globalCompositeOperation = "copy";
    context.fillRect(0, 0, width, height);
    context.globalCompositeOperation = "destination-out";
    context.drawImage(image, 0, 0, width, height);
  },
  stroke(context, { isEraser, size, points }) {
    context.globalCompositeOperation = isEraser ? "destination-out" : "source-over";
    context.lineWidth = size;
    context.beginPath();
    const [[x, y], ...others] = points;
    context.moveTo(x, y);
    // A line without length draws nothing.
    for (const point of others.length ? others : [[x + 0.01, y]]) context.lineTo(...point);
    context.stroke();
  },
  clear(context, _, { width, height }) {
    context.clearRect(0, 0, width, height);
  },
  invert(context, _, { width, height }) {
    context.globalCompositeOperation = "xor";
    context.fillRect(0, 0, width, height);
  },
};

export class PaintedMask {
  constructor(canvas, image) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    Object.assign(this.context, { lineCap: "round", lineJoin: "round" });
    this.context.fillStyle = this.context.strokeStyle = COLOUR;
    this.first = { kind: "hole", image };
    this.done = [];
    this.undone = [];
    this.redraw();
  }

  act(step) {
    this.done.push(step);
    this.undone = [];
    this.draw(step);
  }

  extend(point) {
    const stroke = this.done.at(-1);
    stroke.points.push(point);
    this.draw({ ...stroke, points: stroke.points.slice(-2) });
  }

  undo() {
    if (this.done.length) this.undone.push(this.done.pop());
    this.redraw();
  }

  redo() {
    if (this.undone.length) this.done.push(this.undone.pop());
    this.redraw();
  }

  redraw() {
    for (const step of [{ kind: "clear" }, this.first, ...this.done]) this.draw(step);
  }

  draw(step) {
    DRAW[step.kind](this.context, step, this.canvas);
  }

  get share() {
    const small = new OffscreenCanvas(SAMPLES, SAMPLES).getContext("2d");
    small.drawImage(this.canvas, 0, 0, SAMPLES, SAMPLES);
    const { data } = small.getImageData(0, 0, SAMPLES, SAMPLES);
    let sum = 0;
    for (let i = 3; i < data.length; i += 4) sum += data[i];
    return sum / (255 * SAMPLES * SAMPLES);
  }

  toFile() {
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width: this.canvas.width, height: this.canvas.height });
    const context = canvas.getContext("2d");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "destination-out";
    context.drawImage(this.canvas, 0, 0);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}
